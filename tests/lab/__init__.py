"""Nodes as processes on machines of their own: namespaces with real interfaces, bridges and routes."""
