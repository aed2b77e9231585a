"""What runs before and while the prelude is imported: .pth finder, hook of Ray, plugin of vLLM, settings of workers."""
