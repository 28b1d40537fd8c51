"""The room of keys, values and buffers: where cells lie, and who has what passes leave."""
