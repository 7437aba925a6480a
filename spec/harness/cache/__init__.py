"""The world of the cache: operations on a manager, and the model beside it."""
