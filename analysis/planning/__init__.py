"""Turn fitted models into candidates and choose among them."""
