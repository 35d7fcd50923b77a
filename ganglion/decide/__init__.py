"""The half that decides: plain Python without torch, clock, process or socket."""
