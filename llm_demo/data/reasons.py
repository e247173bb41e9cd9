"""Why a turn or an example is not learnt, and what is said of turns that are."""

# Reasons why a turn is not learnt.
REFUSED = "the chat template refuses the conversation"
REWRITTEN = "the chat template does not keep the assistant text as given, or does not end it"
NO_REASONING = (
    "the chat template drops the turn's reasoning; keep it by a variable of the template "
    "(--chat_template_kwargs) or by another template (--chat_template)"
)
NO_PROMPT = "there is no prompt before the assistant turn"
EMPTY_TURN = "the assistant turn is empty"
ENDS_INSIDE = "the assistant text contains the token that ends a turn"
UNMARKED = "the chat template's {% generation %} marks leave the turn out"
UNSTOPPED = "no stop token after an assistant turn"
STRADDLED = "a token straddles the start of an assistant turn"
UNCLOSED = "the turn's reasoning is not closed, so it has no answer"
NOTHING = "nothing to learn"
NO_CALLS = "the chat template does not support tool calls (function_call turns)"
LEFT_OUT = "the chat template drops the {role} turn"
MARKED = "marked with weight 0, train false or the like"
NO_TEXT = "it contains half a surrogate pair: invalid text"
NOT_OURS = "marked to be learnt, but only the assistant's answers can be"
RENDERED = (
    "a prompt contains tokens that the chat template writes itself, such as {token}: give the bare "
    "text, or a prompt that ends as the template's generation prompt does"
)

# What is said of turns that are learnt.
UNOPENED = (
    "the chat template writes them without the block of reasoning that its prompt holds, so the "
    "model is asked with another prompt than it is trained with"
)
WITH_REASONING = (
    "have reasoning, which is context (--learn_reasoning false), but the model is asked without it"
)
ONLY_CLOSED = "their reasoning has no opening tag; all before </think> is context"
SPECIALS_INSIDE = "special tokens stand in their text; they are read as special tokens"
NO_VARIABLE = (
    "the example's chat_template_kwargs name a variable that the chat template does not have"
)
REMARKS = (UNOPENED, WITH_REASONING, ONLY_CLOSED, SPECIALS_INSIDE, NO_VARIABLE)
