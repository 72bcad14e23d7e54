"""What ours is compared with; one file each, at its best setting."""
