"""Run one worker of a data-parallel job."""
