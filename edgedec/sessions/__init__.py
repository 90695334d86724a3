"""Sessions around a runtime's session: joined forwards, a sliding window, two models in turn."""
