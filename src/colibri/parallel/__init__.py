"""Routed experts over several processes, on torch.distributed."""

from colibri.parallel.experts import ALL_TO_ALL, GATHER, ExpertParallel
from colibri.parallel.groups import Group, Mesh
from colibri.parallel.replicas import Assignment

__all__ = ["ALL_TO_ALL", "GATHER", "Assignment", "ExpertParallel", "Group", "Mesh"]
