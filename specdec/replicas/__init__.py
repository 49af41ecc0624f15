"""Several engines behind one address: processes of their own, or deployed on Ray."""
