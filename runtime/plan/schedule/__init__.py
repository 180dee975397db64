"""The order of actions within a pass, without bytes and seconds, and a checker that validates schedules."""
