"""Prediction for a recorded load under other settings: the production core and a fitted cost model."""

from services.scheduler.what_if.cost import FEATURES, HostCost, StepCost
from services.scheduler.what_if.history import History
from services.scheduler.what_if.measurements import Figure, Measurements, RequestMeasurement
from services.scheduler.what_if.prediction import FittedModel, Range, recorded
from services.scheduler.what_if.simulation import ModelledDevice, WhatIf, limits_for
