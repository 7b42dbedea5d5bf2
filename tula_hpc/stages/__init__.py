"""Profile, plan, train and study as steps that can be resumed."""
