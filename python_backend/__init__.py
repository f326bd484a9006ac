"""What runs inside Triton's Python processes."""
