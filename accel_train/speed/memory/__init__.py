"""Memory of a device: what fits, torch's allocator, frozen blocks in host memory."""
