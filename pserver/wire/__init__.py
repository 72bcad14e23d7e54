"""What travels: where each tensor lies in the flats (layout), tensors as bytes (tensors), open values (values)."""
