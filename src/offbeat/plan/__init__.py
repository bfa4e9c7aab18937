"""Predict wall-clock time before renting the machines."""

from offbeat.plan.job import Cluster, Cosine, Flat, Job, read
from offbeat.plan.prediction import Plan, Prediction, plan, predict

__all__ = ["Cluster", "Cosine", "Flat", "Job", "Plan", "Prediction", "plan", "predict", "read"]
