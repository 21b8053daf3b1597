from hypothesis import settings

# Examples are not timed: machines that run tests are busy. pytest-timeout bounds each test as a whole.
settings.register_profile("engram", deadline=None)
settings.load_profile("engram")
