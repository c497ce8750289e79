"""Training and measuring networks under rematerialization policies."""
