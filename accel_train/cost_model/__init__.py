"""Time of a step: named devices and links, rates of data sheets or of a calibration, and how it scales."""
