"""Calls of the daemons of other machines, which send jobs to this one."""
