"""Laws that an optimizer, a scaler and a step must keep; one line runs them all."""
