"""An HTTP service that classifies images."""
