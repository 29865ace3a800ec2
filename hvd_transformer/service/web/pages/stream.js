// One stream of Server-Sent Events, read through fetch: unlike EventSource it can resume after any event, tells a 401
// from a lost connection, and notices a connection that has gone silent.

// The service sends a comment every 15 s.
const SILENT_MS = 40000;

/**
 * Reads events until the stream ends, fails, falls silent or is aborted.
 * @param {string} url
 * @param {{lastId: ?string, signal: AbortSignal, onOpen: () => void, onEvent: (kind: string, data: any, id: ?string) => void}} options
 * @returns {Promise<number>} the HTTP status where it was refused, otherwise 0
 */
export async function readStream(url, { lastId, signal, onOpen, onEvent }) {
  const stop = new AbortController();
  const abort = () => stop.abort();
  signal.addEventListener("abort", abort, { once: true });
  let timer = setTimeout(abort, SILENT_MS);
  try {
    const headers = { Accept: "text/event-stream" };
    if (lastId) headers["Last-Event-ID"] = lastId;
    const response = await fetch(url, { headers, signal: stop.signal, cache: "no-store", credentials: "same-origin" });
    if (!response.ok) return response.status;
    onOpen();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return 0;
      clearTimeout(timer);
      timer = setTimeout(abort, SILENT_MS);
      const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) dispatch(block, onEvent);
    }
  } catch {
    return 0;
  } finally {
    clearTimeout(timer);
    signal.removeEventListener("abort", abort);
  }
}

function dispatch(block, onEvent) {
  let kind = "message";
  let id = null;
  const data = [];
  for (const line of block.split("\n")) {
    const [, field, value] = /^([^:]*):? ?(.*)$/.exec(line);
    if (field === "event") kind = value;
    else if (field === "id") id = value;
    else if (field === "data") data.push(value);
  }
  if (!data.length) return;
  let parsed;
  try {
    parsed = JSON.parse(data.join("\n"));
  } catch {
    return;
  }
  onEvent(kind, parsed, id);
}
