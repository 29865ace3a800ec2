// Colours and dashes of lines: seven colours that colour-blind people can tell apart (after Okabe and Ito), times three
// dashes, so that 20 lines differ.

const COLOURS = {
  light: ["#0067a8", "#c94f00", "#007a5a", "#b0457f", "#a87400", "#3f3f9f", "#5f6670"],
  dark: ["#5ab4f0", "#f58b4c", "#34c79b", "#e58fc0", "#e8b53c", "#a3a3f5", "#b4bbc6"],
};
const HUES = 6; // without the grey, which marks launches outside the queue
const DASHES = [[], [7, 4], [2, 3]];

/**
 * The look of line number `index`.
 * @param {number} index
 * @returns {{colour: string, dash: number[]}}
 */
export function lineStyle(index) {
  const colours = COLOURS[document.documentElement.dataset.theme === "dark" ? "dark" : "light"];
  return { colour: colours[index % colours.length], dash: DASHES[Math.floor(index / colours.length) % DASHES.length] };
}

/**
 * A colour that stays with a job, for the map of hosts.
 * @param {number} id
 * @returns {number} 0 to 5
 */
export function jobHue(id) {
  return id % HUES;
}
