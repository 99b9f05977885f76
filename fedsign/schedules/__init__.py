"""Learning-rate schedules over rounds: functions of (round from 1, number of rounds) and their settings."""
