// Starts the sections of the page, and hands them each state that arrives.
import * as add from "./add.js";
import * as compare from "./compare.js";
import { forgetOutage } from "./dom.js";
import * as done from "./done.js";
import { connect } from "./live.js";
import * as form from "./form.js";
import * as now from "./now.js";
import * as results from "./results.js";
import * as tabs from "./tabs.js";
import * as toast from "./toast.js";
import * as view from "./view.js";
import * as viewer from "./viewer.js";
import * as whose from "./whose.js";

tabs.start();
toast.start();
view.start();
whose.start(() => {
  now.showAgain();
  results.reload();
});
done.start();
add.start();
now.start();
viewer.start();
compare.start();
results.start();
connect((state) => {
  if (state.outage) return;
  now.show(state);
  whose.refresh(state);
  form.offer(state);
  results.refresh(state);
  add.refresh(state);
  done.watch(state);
}, () => {
  forgetOutage();
  add.retry();
  results.recover();
});
