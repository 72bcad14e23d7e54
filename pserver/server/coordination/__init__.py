"""What the next coordinator must know, and who leads: one interface; in memory, in a directory, in etcd."""
