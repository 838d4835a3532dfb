"""The scheduler service: owns the truth about every request, decides each step, runs ahead of the workers."""
