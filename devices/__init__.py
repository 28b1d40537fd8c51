"""What a device is and has, and how devices find and reach each other."""
