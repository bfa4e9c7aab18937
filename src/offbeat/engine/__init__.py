"""What drives a method: the synchronizer, its parts, and the rounds they hold."""
