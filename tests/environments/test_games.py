"""The environments of the embedded tasks: answers, rewards and errors."""

import pytest

from rlhf.environments.environment import Answer, Example
from rlhf.environments.library import Calculator, GuessNumber


def begun(kind: type):
    made = kind()
    made.reset(Example(prompt="", reference=" #### 20", record={"secret": 7}, seed=0, sample=0))
    return made


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        (" calc 7 + 5", Answer(" 12")),
        (" #### 20", Answer(reward=1.0, done=True)),
        (" #### 21", Answer(reward=0.0, done=True)),
        *(
            (text, Answer(" error", error=True))
            for text in ("", " calc 7 +", " #### 20 20", " 20", " calc 7 + 5 #### 20")
        ),
    ],
)
def test_the_calculator_adds_and_rewards_the_right_sum(reply, answer):
    assert begun(Calculator).step(reply) == answer


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        (" 6", Answer(" higher")),
        (" 8", Answer(" lower")),
        (" 7", Answer(" lower", 1.0, True)),
        *((text, Answer(" error", error=True)) for text in ("", " 7 7", " higher", " ²")),
    ],
)
def test_the_game_says_where_the_number_is_and_ends_with_it(reply, answer):
    assert begun(GuessNumber).step(reply) == answer
