"""Will it fit? What each device will hold and how long a step must take, before there is a model."""

from keras_qwen.planner.batch_size import find_batch_size
from keras_qwen.planner.plan import MemoryPlan, plan
from keras_qwen.planner.suggest import suggest

__all__ = ["MemoryPlan", "find_batch_size", "plan", "suggest"]
