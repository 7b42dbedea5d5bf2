"""Turn times into money, energy and waiting."""
