"""Measurements that run in processes of their own."""
