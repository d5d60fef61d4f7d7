"""What a recipe's table `[augmentation]` does to training batches."""
