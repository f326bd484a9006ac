// Server-sent events over fetch: EventSource cannot send a key, nor a POST.

/** Calls `tell(kind, data)` for each event of a response, until it ends. */
export async function readEvents(response, tell) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      let kind = "message";
      const data = [];
      for (const line of block.split("\n")) {
        if (line.startsWith("event: ")) kind = line.slice(7);
        if (line.startsWith("data: ")) data.push(line.slice(6));
      }
      if (data.length) tell(kind, data.join("\n"));
    }
  }
}

/** The headers of a request, with the key if there is one. */
export function headers(key, more = {}) {
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

/** The message of a refused request, in words for the person who asked. */
export async function refusal(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch {
    // not in the form of our errors: the status must do
  }
  if (response.status === 401) return `${message}. Enter it under Options.`;
  if (response.status === 429) return `The server has no room right now: ${message}`;
  return message;
}
