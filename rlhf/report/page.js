// Pointing at an element of a group dims the other groups in all figures and tables.
const groupOf = (element) => [...element.classList].find((name) => /^series-\d+$/.test(name));
for (const element of document.querySelectorAll(".series")) {
  element.addEventListener("pointerenter", () => {
    document.body.classList.add("focused");
    for (const other of document.querySelectorAll("." + groupOf(element))) other.classList.add("focus");
  });
  element.addEventListener("pointerleave", () => {
    document.body.classList.remove("focused");
    for (const other of document.querySelectorAll(".focus")) other.classList.remove("focus");
  });
}
// Clicking a heading sorts its table, first in descending, then in ascending order. Empty cells stay last.
for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => {
    const heading = button.closest("th");
    const down = heading.getAttribute("aria-sort") !== "descending";
    for (const other of heading.parentElement.children) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = button.closest("table").tBodies[0];
    const value = (row) => parseFloat(row.cells[heading.cellIndex].dataset.value ?? (down ? "-Infinity" : "Infinity"));
    body.append(...[...body.rows].sort((a, b) => (down ? value(b) - value(a) : value(a) - value(b)) || 0));
  });
}
