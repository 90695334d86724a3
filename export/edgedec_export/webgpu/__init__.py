"""The webgpu runtime: exported graphs on any GPU, in a process of their own."""
