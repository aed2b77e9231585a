"""What runs before and while the prelude is imported: .pth finder, plugin of vLLM."""
