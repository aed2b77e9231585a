"""What a run is: the recipe section, the composed configuration, and the rules that it must keep."""
