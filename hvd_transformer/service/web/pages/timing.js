// When work is done: at most so often, and never on a page that nobody sees.

/**
 * Wraps an action so that it runs at most once per interval and never twice at a time; the last request is kept. While
 * the page is hidden nothing runs: "resync" comes when it is seen again.
 * @param {() => any} action
 * @param {number} milliseconds
 * @param {AbortSignal} signal
 * @returns {() => void}
 */
export function throttle(action, milliseconds, signal) {
  let wanted = false;
  let resting = false;
  const run = async () => {
    if (signal.aborted || document.hidden) return;
    wanted = false;
    resting = true;
    const began = Date.now();
    try {
      await action();
    } finally {
      setTimeout(
        () => {
          resting = false;
          if (wanted) run();
        },
        Math.max(0, milliseconds - (Date.now() - began)),
      );
    }
  };
  return () => {
    wanted = true;
    if (!resting) run();
  };
}

/**
 * Does something again and again until the page is left, while it is seen.
 * @param {() => any} action
 * @param {number} milliseconds
 * @param {AbortSignal} signal
 */
export function every(milliseconds, signal, action) {
  const timer = setInterval(() => {
    if (!document.hidden) action();
  }, milliseconds);
  signal.addEventListener("abort", () => clearInterval(timer));
}
