// What a report has in place of a server: the snapshot of its run, and the answers to what the page asks. Null if the page
// is served.
const element = document.getElementById("kept");

export const kept = element === null ? null : JSON.parse(element.textContent);
