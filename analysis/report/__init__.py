"""Write the report of a run or study."""
