"""From one composed configuration to a supervised run: recipe, compose, environment, layouts, plan, launch, smoke."""
