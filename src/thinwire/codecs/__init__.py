"""What a packed vector looks like: one module a codec."""
