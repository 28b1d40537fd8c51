"""Who a device is and who belongs to its cluster: keys, the signed list, and changes to it."""
