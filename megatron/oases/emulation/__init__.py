"""A commodity cluster in a box: one process per device, in network namespaces joined by links the kernel shapes."""
