"""One adaptation step of one stream: a pure function from state and batch to the next state."""
