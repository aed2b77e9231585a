"""Train on fixed data (recipe.objective): losses, their place in verl's update, and the data sets."""
