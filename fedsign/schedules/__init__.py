"""Learning-rate schedules: functions of (round, counted from 1; number of rounds) and their settings."""
