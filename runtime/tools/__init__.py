"""Files made of models: grown, packed, and traces of their routers."""
