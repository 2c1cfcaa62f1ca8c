// The last two minutes of one number, as an SVG line.

const NAMESPACE = "http://www.w3.org/2000/svg";
export const LENGTH = 120;

export class Sparkline {
  /** top: the value at the upper edge, or null for the largest seen. */
  constructor(svg, top = null) {
    this.values = [];
    this.top = top;
    this.area = document.createElementNS(NAMESPACE, "polygon");
    this.line = document.createElementNS(NAMESPACE, "polyline");
    svg.setAttribute("viewBox", `0 0 ${LENGTH - 1} 1`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.append(this.area, this.line);
    this.draw();
  }

  get peak() {
    return Math.max(0, ...this.values);
  }

  push(value) {
    this.values.push(value);
    if (this.values.length > LENGTH) this.values.shift();
    this.draw();
  }

  clear() {
    this.values = [];
    this.draw();
  }

  draw() {
    const top = this.top ?? (this.peak || 1);
    const first = LENGTH - this.values.length; // the newest value is at the right edge, LENGTH - 1
    const points = this.values.map((value, i) => `${first + i},${1 - Math.min(value / top, 1)}`);
    this.line.setAttribute("points", points.join(" "));
    this.area.setAttribute(
      "points",
      points.length ? [`${first},1`, ...points, `${LENGTH - 1},1`].join(" ") : "",
    );
  }
}
