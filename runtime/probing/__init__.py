"""How fast this device is: kernels, GPUs and disks, measured."""
