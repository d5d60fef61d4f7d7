"""What the peers' documents recommend; `on_update` takes updates done and the rate."""
